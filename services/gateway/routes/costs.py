"""The route of costs: kWh, money and carbon of the caller's jobs. Knows no rate: rows do."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from msgspec import Meta, Struct

from services.gateway.bodies import CostList
from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import ReadCaller
from services.gateway.http.query import described, query
from services.gateway.schemas import GUARDED, answer, errors, parameters

router = APIRouter(tags=["jobs"], default_response_class=Response, responses=errors(*GUARDED, 400))


class CostQuery(Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/costs`."""

    by: Literal["model", "day", "model,day"] = "model"
    days: Annotated[int, Meta(ge=1, le=366)] = 30
    model: str | None = None


@router.get(
    "/v1/costs",
    openapi_extra=parameters(query=described(CostQuery)),
    responses={200: answer("A row for each model, day, or both", CostList)},
)
async def list_costs(request: Request, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """kWh, money and carbon of the tenant's jobs of `days`, by `model`, `day` or `model,day`."""
    asked = query(request, CostQuery)
    found = await gateway.client.costs(
        num_days=asked.days, by=asked.by.split(","), model=asked.model, tenant=caller.tenant
    )
    return json_response(CostList(data=found))
