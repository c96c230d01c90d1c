# A Homebrew formula that builds from a clone, because nothing is published yet. With a tap of your own that has this file:
#
#   export HOMEBREW_JOURNEYMAN_GIT=file:///path/of/the/clone
#   brew install --HEAD YOU/TAP/journeyman
class Journeyman < Formula
  desc "Worker for the task queue you already run"
  license any_of: ["MIT", "Apache-2.0"]
  head ENV.fetch("HOMEBREW_JOURNEYMAN_GIT", "file:///path/of/the/clone"), using: :git, branch: "main"

  depends_on "rust" => :build
  depends_on :linux

  def install
    system "cargo", "install", "--profile", "dist", *std_cargo_args
    system bin/"journeyman", "man", man1
    generate_completions_from_executable(bin/"journeyman", "completions")
    pkgetc.install "examples/packaging/debian/journeyman.toml"
  end

  test do
    command = "#{bin}/journeyman config check --no-files #{pkgetc}/journeyman.toml 2>&1"
    assert_match "the configuration runs nothing", shell_output(command, 30)
  end
end
