"""Overnight's measuring half: capture, profile, judge, worker, timing, splice; never imports agent."""
