"""Files made from checks and thresholds, without live data: rules and reference pages."""
