"""Exports models to Hugging Face transformers and CTranslate2, and imports MarianMT models."""
