"""Display: a finished `Report` enters.

One string leaves, of text for a terminal or of HTML for a page or a notebook. These files may
import `_doctor.report`, `_doctor.records` and `_common`, and no hook.
"""
