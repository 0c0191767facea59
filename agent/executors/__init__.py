"""Where judging happens: on devices of this host, or on those of a Ray cluster; one seam for both."""
