"""Experiments of the thesis and of four papers: runs, checks of claims, and pages."""
