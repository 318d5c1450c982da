"""Folders of other programs: models are written for Hugging Face transformers and CTranslate2."""
