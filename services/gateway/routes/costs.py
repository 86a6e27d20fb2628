"""The route of costs: kWh, money and carbon of the caller's jobs. Knows no rate: rows do."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.gateway.bodies import CostList
from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import ReadCaller
from services.gateway.http.query import number, query
from services.gateway.schemas import GUARDED, JSON, answer, errors, parameters
from shardline.base.errors import Invalid

router = APIRouter(tags=["jobs"], default_response_class=Response, responses=errors(*GUARDED, 400))

MAX_DAYS = 366
DAYS = 30
GROUPS = ("model", "day", "model,day")


@router.get(
    "/v1/costs",
    openapi_extra=parameters(
        query={
            "by": {"enum": list(GROUPS), "default": GROUPS[0]},
            "days": {"type": "integer", "minimum": 1, "maximum": MAX_DAYS, "default": DAYS},
            "model": {"type": "string"},
        }
    ),
    responses={200: answer("A row for each model, day, or both", {JSON: "CostList"})},
)
async def list_costs(request: Request, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """kWh, money and carbon of the tenant's jobs of `days`, by `model`, `day` or `model,day`."""
    asked = query(request, "by", "days", "model")
    by = asked.get("by", GROUPS[0])
    if by not in GROUPS:
        raise Invalid("by", f"{by[:32]!r} is none of them", f"Use one of: {' | '.join(GROUPS)}")
    num_days = number("days", asked.get("days", str(DAYS)), minimum=1, maximum=MAX_DAYS)
    found = await gateway.client.costs(
        num_days=num_days, by=by.split(","), model=asked.get("model"), tenant=caller.tenant
    )
    document: CostList = {"object": "list", "data": found}
    return json_response(document)
