"""How a report is shown: as text, and as a page."""
