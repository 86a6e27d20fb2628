"""What holds a completion to a form: schemas, forced calls. Knows no template."""
