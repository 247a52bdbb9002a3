# docker build -t optimum-moonshot . && docker run --rm optimum-moonshot    # runs `make demo`
FROM python:3.11-slim
RUN apt-get update && apt-get install --no-install-recommends -y gcc libc6-dev make && rm -rf /var/lib/apt/lists/*
WORKDIR /optimum-moonshot
COPY . .
RUN make .venv/.installed
CMD ["make", "demo"]
