"""What the package tells about itself: counters, events, metrics, log, page."""
