# Builds an image from these sources on any system: docker build -t plimsoll .
# `make image` builds the same as a release has: reproducible, and with a bill of materials.
ARG BUILD_IMAGE=docker.io/library/rust:1.95-bookworm

FROM $BUILD_IMAGE AS build
# PROFILE=demo builds sooner, for a larger and slower program.
ARG PROFILE=release
# ring has parts in C.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends musl-tools && rm -rf /var/lib/apt/lists/*
WORKDIR /plimsoll
COPY . .
RUN target=$(uname -m)-unknown-linux-musl && \
    rustup target add "$target" && \
    cargo build --locked --profile "$PROFILE" --target "$target" && \
    install -D "target/$target/$PROFILE/plimsoll" /image/plimsoll && \
    rm -r target

FROM scratch
ARG REVISION=unknown
COPY --from=build /image/plimsoll /bin/plimsoll
USER 65532:65532
ENTRYPOINT ["/bin/plimsoll"]
LABEL org.opencontainers.image.title="plimsoll" \
      org.opencontainers.image.description="A QoS operator for Kubernetes: load nodes high, keep the important workloads safe" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/plimsoll/plimsoll" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="$REVISION"
