"""Experiments of the thesis and of four papers: which runs, which judge, which page."""
