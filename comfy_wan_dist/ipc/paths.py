"""Names in a group's private folder, which both sides of the socket use."""

from __future__ import annotations

SOCKET_NAME = "socket"
TOKEN_NAME = "token"
AGENT_STORE_NAME = "agent-store"
RANK_STORE_NAME = "rank-store"
LOG_FOLDER_NAME = "logs"
