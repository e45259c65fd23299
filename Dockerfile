# Everything on the page "Scaling out". The build of torch is the one that pip finds, with CUDA on Linux:
#   docker build --tag sightline-image .
#   docker run --gpus all --volume $PWD:/work sightline-image predict runs/x photos/ --out predictions/
FROM python:3.11-slim
COPY pyproject.toml constraints.txt README.md LICENSE /sightline/
COPY src /sightline/src
RUN grep -v "^torch==" /sightline/constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir -c /tmp/constraints.txt "/sightline[cloud,ray,tensorboard]" s3fs
WORKDIR /work
STOPSIGNAL SIGTERM
ENTRYPOINT ["sightline"]
