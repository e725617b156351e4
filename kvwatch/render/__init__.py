"""Presentation, pure: a Report (or a Budget, or a simulation) in, text out. One module per format."""
