"""The reason for every trace, in words.

Signatures of calls, trace events and side effects enter. Ledger entries, log lines and the advice
for each cause leave. This room may import `_common` alone.
"""
