"""Ready configurations, one YAML file each: `rlake run NAME`."""
