"""Distributed training: schedules (when), exchanges (with which ranks), codecs (how encoded) and transports (over what)."""
