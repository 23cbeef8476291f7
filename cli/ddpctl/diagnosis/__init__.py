"""Why a run hangs, is slow or has failed."""
