"""Fixtures that several files of tests share."""

from browser import chromium

__all__ = ["chromium"]
