"""nmt_train: train neural machine translation models on one machine or on many joined by ordinary networks."""

__version__ = "0.1.0"
