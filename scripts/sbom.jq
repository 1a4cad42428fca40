# The CycloneDX bill of materials of a binary: what `cargo metadata` says of the crates that are linked into it, with the checksums of
# Cargo.lock. Arguments: tree (what is linked: lines of `cargo tree`, since the metadata also have what only tests ask for), lock (its
# text), sha256 (of the binary), time, rust (the compiler's version).
def reference: "pkg:cargo/\(.name)@\(.version)";

([$lock | scan("name = \"([^\"]+)\"\nversion = \"([^\"]+)\"\nsource = \"[^\"]+\"\nchecksum = \"([0-9a-f]+)\"")
  | {key: "pkg:cargo/\(.[0])@\(.[1])", value: .[2]}] | from_entries) as $checksums
| ([$tree | scan("(?:^|\n)(\\S+) v(\\S+)") | {key: "pkg:cargo/\(.[0])@\(.[1])", value: true}] | from_entries) as $is_linked
| ([.packages[] | select($is_linked[reference]) | {key: .id, value: .}] | from_entries) as $package
| ([.resolve.nodes[] | select($package[.id])
    | {key: .id, value: [.deps[] | select(any(.dep_kinds[]; .kind == null)) | .pkg | select($package[.])]}] | from_entries) as $needs
| .resolve.root as $root
| $package[$root] as $own
| {
    bomFormat: "CycloneDX",
    specVersion: "1.6",
    version: 1,
    metadata: {
      timestamp: $time,
      component: {
        type: "application", "bom-ref": ($own | reference), name: $own.name, version: $own.version,
        description: $own.description, licenses: [{expression: $own.license}], purl: ($own | reference),
        hashes: [{alg: "SHA-256", content: $sha256}]
      }
    },
    components: ([
      $package[] | select(.id != $root) | reference as $reference
      | {
          type: "library", "bom-ref": $reference, name, version, purl: $reference,
          licenses: (if .license then [{expression: (.license | gsub(" */ *"; " OR "))}] else [] end),
          hashes: [$checksums[$reference] | select(.) | {alg: "SHA-256", content: .}]
        }
    ] + [{
      type: "library", "bom-ref": "pkg:generic/rust@\($rust)", name: "rust", version: $rust, purl: "pkg:generic/rust@\($rust)",
      description: "the standard library, with musl", licenses: [{expression: "MIT OR Apache-2.0"}]
    }] | sort_by(."bom-ref")),
    dependencies: ([
      $package[] | {ref: reference, dependsOn: ([$needs[.id][] | $package[.] | reference] | sort)}
    ] | sort_by(.ref))
  }
