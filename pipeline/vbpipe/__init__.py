"""vbpipe: build model variants into engines, measure every step, ship only what is faster and still right."""

__version__ = "0.1.0"
