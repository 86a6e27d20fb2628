"""The bodies of `/v1/embeddings`, `/v1/rerank` and `/v1/score`. The API's description is made from
these types."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shardline.contract.job import INTERACTIVE_PRIORITY, JobRequest, Priority, TokenId

MAX_TEXTS = 2048
BASE64 = "base64"

Texts = Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_TEXTS)]
Inputs = Annotated[
    tuple[str | TokenId | tuple[TokenId, ...], ...],
    Meta(min_length=1, description="texts, lists of token ids, or the token ids of one text"),
]


class EncoderRequest(JobRequest, frozen=True, kw_only=True):
    """Texts for an encoder; each becomes a job. Parameters that choose a text's tokens are
    refused."""

    prompt: None = None
    messages: None = None
    question: None = None
    document: None = None
    depends_on: None = None
    """`/v1/jobs` takes them."""
    priority: Priority = INTERACTIVE_PRIORITY
    user: str | None = None
    """OpenAI's, without effect."""


class EmbeddingRequest(EncoderRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    input: str | Inputs
    encoding_format: Literal["float", "base64"] = "float"
    """base64: float32 in little-endian order."""


class RerankDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document as Cohere and Jina write it, too."""

    text: str


class RerankRequest(EncoderRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/rerank`."""

    query: str
    documents: Annotated[tuple[str | RerankDocument, ...], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    """Results; None: one for each document."""
    return_documents: bool = False
    dimensions: None = None
    prompt_name: None = None


class ScoreRequest(EncoderRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/score`: one text or several on each side."""

    text_1: str | Texts
    text_2: str | Texts
    dimensions: None = None
    prompt_name: None = None


class TextUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of all texts together."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="embedding"):
    """The vector of one text, as numbers or in base64."""

    index: int
    embedding: tuple[float, ...] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """What `POST /v1/embeddings` answers, in the order of the texts."""

    id: str
    data: tuple[Embedding, ...]
    model: str
    usage: TextUsage


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document's place among those that were sent, from 0, and its score."""

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """What `POST /v1/rerank` answers, the best document first."""

    id: str
    model: str
    results: tuple[RankedDocument, ...]
    usage: TextUsage


class PairScore(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="score"):
    """The score of one pair."""

    index: int
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """What `POST /v1/score` answers, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: tuple[PairScore, ...]
    usage: TextUsage
