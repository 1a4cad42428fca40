class Plimsoll < Formula
  desc "QoS operator for Kubernetes that protects important pods of loaded nodes"
  homepage "@HOME@"
  version "@VERSION@"
  license "Apache-2.0"
  depends_on :linux

  on_intel do
    url "@HOME@/releases/download/v@VERSION@/plimsoll-@VERSION@-linux-amd64.tar.gz"
    sha256 "@SHA256_AMD64@"
  end

  on_arm do
    url "@HOME@/releases/download/v@VERSION@/plimsoll-@VERSION@-linux-arm64.tar.gz"
    sha256 "@SHA256_ARM64@"
  end

  def install
    bin.install "plimsoll", "kubectl_complete-plimsoll"
    bin.install_symlink "plimsoll" => "kubectl-plimsoll"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/plimsoll.bash" => "plimsoll"
    zsh_completion.install "completions/_plimsoll"
    fish_completion.install "completions/plimsoll.fish"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/plimsoll --version")
  end
end
