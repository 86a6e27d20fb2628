"""The commands plan, scale, devices and simulate of `shardline`."""
