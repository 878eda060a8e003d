#include "peer.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "fusedmoe/error.h"

namespace fusedmoe::tool {
namespace {

namespace fs = std::filesystem;

// Importing torch takes seconds, from a cold disk a minute; packing a large layer, too.
constexpr double kStartSeconds = 120;
constexpr double kLoadSeconds = 300;
// Of a turn: a few steps, or one step of many tokens in a plain loop.
constexpr double kStepSeconds = 300;

fs::path adapters_folder() {
  if (const char* folder = std::getenv("FUSEDMOE_PEERS_DIR"); folder != nullptr) return folder;
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  for (const char* folder : {"../share/fusedmoe/peers", "../../bench/peers"}) {
    if (fs::is_directory(program / folder, ignored)) return program / folder;
  }
  throw Error(ErrorCode::io,
              "--compare: expected the adapters of bench/peers beside the command, got none; set "
              "FUSEDMOE_PEERS_DIR to their folder");
}

}  // namespace

std::string peers_python() {
  const char* chosen = std::getenv("FUSEDMOE_PEERS_PYTHON");
  return chosen != nullptr && chosen[0] != '\0' ? chosen : "python3";
}

std::vector<Adapter> find_adapters() {
  std::vector<Adapter> adapters;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(adapters_folder(), error)) {
    const std::string stem = entry.path().stem().string();
    const std::string suffix = entry.path().extension().string();
    if (!entry.is_regular_file() || stem.empty() || stem[0] == '_' || suffix != ".py") continue;
    adapters.push_back({stem, entry.path().string()});
  }
  std::sort(adapters.begin(), adapters.end(),
            [](const Adapter& a, const Adapter& b) { return a.name < b.name; });
  return adapters;
}

Peer::Peer(const Adapter& adapter, int threads) : name_(adapter.name) {
  try {
    process_ = std::make_unique<PeerProcess>(std::vector<std::string>{
        peers_python(), adapter.path, "--threads", std::to_string(threads)});
    const nlohmann::json hello = process_->receive(kStartSeconds);
    if (hello.contains("missing")) {
      reason_ = "not installed (" + hello.value("missing", "") +
                "): " + hello.value("install", "its adapter does not say how");
      process_.reset();
      failed_ = true;
      return;
    }
    version_ = hello.value("version", "of unknown version");
    about_ = hello.value("about", "");
  } catch (const PeerFailed& error) {
    fail(error.what());
  } catch (const nlohmann::json::exception& error) {
    fail(std::string("its first line has a wrong type: ") + error.what());
  }
}

void Peer::fail(const std::string& why) {
  reason_ = why;
  failed_ = true;
  process_.reset();
}

nlohmann::json Peer::ask(const nlohmann::json& request, double seconds) {
  if (!runs()) return {};
  try {
    nlohmann::json answer = process_->ask(request, seconds);
    if (answer.value("ok", false)) return answer;
    if (answer.contains("refused")) {
      reason_ = answer.value("refused", "");
    } else {
      fail(answer.contains("error") ? answer.value("error", "")
                                    : "answered neither ok, refused nor error");
    }
  } catch (const PeerFailed& error) {
    fail(error.what());
  } catch (const nlohmann::json::exception& error) {
    fail(std::string("its answer has a wrong type: ") + error.what());
  }
  return {};
}

void Peer::add_layer(const nlohmann::json& shape, const SharedMemory& memory,
                     const nlohmann::json& tensors) {
  const nlohmann::json answer =
      ask({{"do", "layer"}, {"shape", shape}, {"memory", memory.fd()}, {"tensors", tensors}},
          kLoadSeconds);
  if (!runs()) return;
  try {
    mode_ = answer.value("mode", "a16");
  } catch (const nlohmann::json::exception& error) {
    fail(std::string("its answer has a wrong type: ") + error.what());
  }
}

void Peer::forget(const SharedMemory& memory) {
  ask({{"do", "forget"}, {"memory", memory.fd()}}, kLoadSeconds);
}

void Peer::set_inputs(const nlohmann::json& inputs) { ask(inputs, kLoadSeconds); }

void Peer::apply(std::int64_t layer, std::int64_t routing) {
  ask({{"do", "check"}, {"layer", layer}, {"routing", routing}}, kStepSeconds);
}

std::vector<double> Peer::time(const std::vector<std::vector<std::int64_t>>& steps) {
  const nlohmann::json answer = ask({{"do", "steps"}, {"steps", steps}}, kStepSeconds);
  if (!runs()) return {};
  const auto times = answer.find("time_us");
  bool good = times != answer.end() && times->is_array() && times->size() == steps.size();
  for (std::size_t i = 0; good && i < steps.size(); ++i) {
    good = (*times)[i].is_number() && (*times)[i].get<double>() > 0;
  }
  if (good) return times->get<std::vector<double>>();
  fail("answered steps without a time for each");
  return {};
}

void Peer::clear() {
  if (failed_) return;
  reason_.clear();
  ask({{"do", "clear"}}, kLoadSeconds);
}

}  // namespace fusedmoe::tool
