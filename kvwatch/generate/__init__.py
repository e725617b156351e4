"""Files made from checks and thresholds, without live data: rules and reference pages."""

TAG = "kvwatch"
"""The tag of every dashboard, and the start of its uid and file name."""
