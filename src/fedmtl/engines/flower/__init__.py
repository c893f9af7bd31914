"""Jobs and Updates between machines, over Flower: its fleet protocol, its node keys, its messages and its store.

Nothing here decides who may join or what counts; it moves bytes.
"""

import os

# Flower reads them when it is imported, which is always after this.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
