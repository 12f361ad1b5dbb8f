"""`python -m services.api`."""

from __future__ import annotations

import sys

from services.api.server import main

sys.exit(main())
