"""Experiments of the thesis and of five papers: runs, checks of claims, and pages."""
