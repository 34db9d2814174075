"""The tables of the router's store. Every row belongs to a tenant, and no query leaves its tenant
out, but for those of the housekeeping.

    tenants ── bytes that each keeps
    responses ── items     the input of one response, then its output, in order
              └─ events    of a background response that is streamed, in batches
    conversations ── items
    files ── parts        what was uploaded, and what batches answered, in order
    batches               each reads a file, and writes two
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

SCHEMA_VERSION = 1
"""Is written into the store; a router of another version leaves such a store alone."""

METADATA = MetaData()

SCHEMA = Table("tandem_schema", METADATA, Column("version", Integer, primary_key=True))

TENANTS = Table(
    "tandem_tenants",
    METADATA,
    Column("name", String, primary_key=True),
    Column("num_bytes", BigInteger, nullable=False),
)

RESPONSES = Table(
    "tandem_responses",
    METADATA,
    Column("tenant", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("previous", String, nullable=False),
    Column("conversation", String, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("status", String, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("is_background", Boolean, nullable=False),
    Column("is_stream", Boolean, nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("owner", String, nullable=False),
    Column("lease_until", Float, nullable=False),
    Column("attempt", Integer, nullable=False),
    Index("tandem_responses_expiry", "expires_at"),
    Index("tandem_responses_leases", "status", "lease_until"),
)

CONVERSATIONS = Table(
    "tandem_conversations",
    METADATA,
    Column("tenant", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("locked_by", String, nullable=False),
    Column("locked_until", Float, nullable=False),
    Index("tandem_conversations_expiry", "expires_at"),
)

ITEMS = Table(
    "tandem_items",
    METADATA,
    Column("tenant", String, primary_key=True),
    Column("holder", String, primary_key=True),
    Column("place", Integer, primary_key=True),
    Column("id", String, nullable=False),
    Column("is_output", Boolean, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("tandem_items_by_id", "tenant", "id"),
)
"""`holder` is a response or a conversation; `data` is the JSON of the item, as it came."""

EVENTS = Table(
    "tandem_events",
    METADATA,
    Column("tenant", String, primary_key=True),
    Column("response", String, primary_key=True),
    Column("first", Integer, primary_key=True),
    Column("count", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
"""`data` is the text of `count` events, compressed; `first` is the number of the first."""

FILES = Table(
    "tandem_files",
    METADATA,
    Column("tenant", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("purpose", String, nullable=False),
    Column("filename", String, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("num_lines", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("is_whole", Boolean, nullable=False),
    Index("tandem_files_expiry", "expires_at"),
)
"""Files that are not whole are being written, and clients do not see them."""

PARTS = Table(
    "tandem_file_parts",
    METADATA,
    Column("tenant", String, primary_key=True),
    Column("file", String, primary_key=True),
    Column("place", Integer, primary_key=True),
    Column("num_lines", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
"""`data` is whole lines, of which the first has the number `place`. A line that a batch answered is
a part of its own, with the number of the line that it answers: so none is answered twice."""

BATCHES = Table(
    "tandem_batches",
    METADATA,
    Column("tenant", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("status", String, nullable=False),
    Column("endpoint", String, nullable=False),
    Column("window", String, nullable=False),
    Column("model", String, nullable=False),
    Column("input_file", String, nullable=False),
    Column("output_file", String, nullable=False),
    Column("error_file", String, nullable=False),
    Column("output_ttl_s", Float, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("kept_until", Float, nullable=False),
    Column("times", LargeBinary, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("errors", LargeBinary, nullable=False),
    Column("num_total", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("owner", String, nullable=False),
    Column("lease_until", Float, nullable=False),
    Column("attempt", Integer, nullable=False),
    Index("tandem_batches_leases", "status", "lease_until"),
    Index("tandem_batches_expiry", "kept_until"),
)
