"""Tiny random-weight models."""
