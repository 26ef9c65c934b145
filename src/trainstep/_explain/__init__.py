"""Why a trace happened, in words: signatures, the ledger, causes and cures."""
