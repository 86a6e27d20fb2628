"""Tuning: which settings suit a load best, tried in the simulator and written as a profile that stages read."""
