"""OpenAI's door to files."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from services.gateway.batches.line_answers import output_lines
from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.files.bodies import (
    FILE_ID,
    PREFIX,
    DeletedFile,
    FileList,
    FileQuery,
    UploadedFile,
    file_id_of,
    file_name,
    upload_schema,
)
from services.gateway.files.contents import MEDIA, chunks, content_response
from services.gateway.files.upload_form import FORM
from services.gateway.files.uploads import upload
from services.gateway.guard import CancelCaller, ReadCaller, SubmitCaller
from services.gateway.http.query import described, path_id, query
from services.gateway.schemas import GUARDED, Content, answer, errors, parameters
from shardline.store import files

ROUTE = "/v1/files"
ONE = f"{ROUTE}/{{file_id}}"

router = APIRouter(
    tags=["OpenAI"], default_response_class=Response, responses=errors(*GUARDED, 400, 404)
)

FileIdPath = Annotated[str, Path(json_schema_extra={"pattern": FILE_ID})]
BODY = {"requestBody": {"required": True, "content": {FORM: {"schema": upload_schema()}}}}
CONTENT = Content(media=MEDIA, schema={"type": "string"})


@router.post(
    ROUTE,
    openapi_extra=BODY,
    responses={200: answer("The file", UploadedFile), **errors(408, 409, 413, 415)},
)
async def create_file(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Upload a file of a batch's requests, one JSON object a line."""
    return json_response(UploadedFile.of(await upload(gateway, request, caller)))


@router.get(
    ROUTE,
    openapi_extra=parameters(query=described(FileQuery)),
    responses={200: answer("A page", FileList)},
)
async def list_files(request: Request, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """List the tenant's files, newest first unless `order` is asc: those that were uploaded, and
    those that batches have."""
    asked = query(request, FileQuery)
    page = partial(
        files.list_files,
        tenant=caller.tenant,
        purpose=asked.purpose,
        limit=asked.limit,
        after=None if asked.after is None else file_id_of(asked.after, "after"),
        is_ascending=asked.order == "asc",
    )
    found, has_more = await gateway.client.ask(page)
    data = [UploadedFile.of(one) for one in found]
    return json_response(
        FileList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=has_more,
        )
    )


@router.get(ONE, responses={200: answer("The file", UploadedFile)})
async def get_file(file_id: FileIdPath, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """A file, without its content."""
    wanted = partial(files.get_file, file_id=path_id(file_id, PREFIX), tenant=caller.tenant)
    return json_response(UploadedFile.of(await gateway.client.ask(wanted)))


@router.delete(ONE, responses={200: answer("It is gone", DeletedFile), **errors(409)})
async def delete_file(file_id: FileIdPath, gateway: GatewayDep, caller: CancelCaller) -> Response:
    """Delete a file. Of a batch's output the lines stay jobs until their retention passes."""
    wanted = path_id(file_id, PREFIX)
    await gateway.client.ask(partial(files.delete_file, file_id=wanted, tenant=caller.tenant))
    return json_response(DeletedFile(id=file_name(wanted), deleted=True))


@router.get(f"{ONE}/content", responses={200: answer("The content", CONTENT)})
async def get_content(file_id: FileIdPath, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """The content of a file."""
    wanted = partial(files.get_file, file_id=path_id(file_id, PREFIX), tenant=caller.tenant)
    file = await gateway.client.ask(wanted)
    pieces = chunks(gateway, file) if file.part is None else output_lines(gateway, file)
    return await content_response(pieces, filename=file.filename)
