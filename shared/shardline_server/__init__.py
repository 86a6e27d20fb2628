"""What only the services share: broker, failpoints, metrics, traces, tokenizers, and
the statements that move a job on. No producer needs it; knows no service.
"""
