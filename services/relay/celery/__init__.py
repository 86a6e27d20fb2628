"""What a Celery task does when its job has ended: results, links and canvases."""
