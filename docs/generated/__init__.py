"""Pages that are written from the code: `make documents`. A test fails when a page is not what its
module writes."""
