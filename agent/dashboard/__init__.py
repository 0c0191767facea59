"""The dashboard: the workspace's sessions as live pages on this machine, read-only."""
