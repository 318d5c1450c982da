"""The life of a rank while it trains."""
