"""Pictures and tables from run folders."""
