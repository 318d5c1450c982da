"""The exchanges: how workers communicate."""
