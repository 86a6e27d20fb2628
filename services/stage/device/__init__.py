"""The device of a stage: its cores and memory, and the locks that share them with other stages.
Knows no model."""
