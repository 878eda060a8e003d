// `bench --compare` with the peers of tests/tools/peers/: who runs when, and every way in which a
// peer fails, none of which may touch our own rows.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <set>
#include <sstream>

#include "bench_turns.h"
#include "cpu_use.h"
#include "peer_process.h"
#include "run_command.h"

namespace fusedmoe::tool {
namespace {

const std::string kBench =
    "bench --shape 16,8,4,2 --layers 2 --tokens 3 --threads 1 --seconds 0.05 --json ";

CommandResult compare(const std::string& arguments, const std::string& environment = "") {
  return run_command(kBench + arguments,
                     environment + " FUSEDMOE_PEERS_DIR='" FUSEDMOE_TEST_PEERS_DIR "'");
}

nlohmann::json peer_of(const CommandResult& result, const std::string& name) {
  const auto rows = result.rows();
  EXPECT_EQ(rows.size(), 1U) << result.errors;
  for (const nlohmann::json& peer : rows.at(0).at("peers")) {
    if (peer.at("name") == name) return peer;
  }
  ADD_FAILURE() << "no peer " << name << " in " << result.output;
  return {};
}

std::string reason_of(const CommandResult& result, const std::string& name) {
  const nlohmann::json peer = peer_of(result, name);
  EXPECT_FALSE(peer.contains("time_us")) << peer;  // nobody reads it as a result
  EXPECT_FALSE(peer.contains("speedup")) << peer;
  return peer.value("reason", "");
}

TEST(Compare, RowsHaveThePeersTimes) {
  const CommandResult result = compare("--compare good_a,good_b");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const nlohmann::json row = result.rows().at(0);
  ASSERT_EQ(row["peers"].size(), 2U);
  for (const char* name : {"good_a", "good_b"}) {
    const nlohmann::json peer = peer_of(result, name);
    std::set<std::string> keys;
    for (const auto& [key, value] : peer.items()) keys.insert(key);
    EXPECT_EQ(keys, (std::set<std::string>{"name", "version", "rel_l2", "mode", "time_us", "ratio",
                                           "speedup"}));
    EXPECT_EQ(peer["mode"], "a16");
    EXPECT_EQ(peer["version"], "1.2.3");
    EXPECT_LT(peer["rel_l2"], 1e-2);
    const double median = peer["time_us"]["median"];
    EXPECT_GT(peer["time_us"]["min"], 0.0);
    EXPECT_LE(peer["time_us"]["min"], median);
    EXPECT_LE(median, peer["time_us"]["max"]);
    const double floor = row["floor_us"];
    const double ours = row["time_us"]["median"];
    EXPECT_NEAR(peer["ratio"].get<double>() / (median / floor), 1, 0.05);
    EXPECT_NEAR(peer["speedup"].get<double>() / (median / ours), 1, 0.05);
  }
  EXPECT_NE(result.errors.find("good_a"), std::string::npos);  // who was compared, with version
  EXPECT_NE(result.errors.find("1.2.3"), std::string::npos);
}

// Peers get codes and scales, as they lie in a checkpoint.
TEST(Compare, QuantisedWeightsReachThePeers) {
  const CommandResult result = compare("--compare good_a --format int8");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const nlohmann::json peer = peer_of(result, "good_a");
  EXPECT_TRUE(peer.contains("time_us")) << peer;
  EXPECT_LT(peer["rel_l2"], 1e-2);
}

// Who rounds activations to eight bits may be further from us, as far as that explains.
TEST(Compare, APeerInModeA8HasAToleranceOfItsOwn) {
  const CommandResult result = compare("--compare rounds");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const nlohmann::json peer = peer_of(result, "rounds");
  EXPECT_EQ(peer["mode"], "a8");
  EXPECT_NEAR(peer["rel_l2"], 0.03, 0.01);
  EXPECT_TRUE(peer.contains("time_us")) << peer;
}

TEST(Compare, TakesTurns) {
  const TestFolder folder;
  const std::string file = (folder / "log").string();
  const CommandResult result = compare("--compare good_a,good_b", "FAKE_PEER_LOG='" + file + "'");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  std::istringstream lines(read_file(file));
  std::vector<std::string> turns;  // names, a new one for each turn
  std::set<std::string> layers;
  std::set<std::string> routings;
  std::size_t longest = 0;
  std::size_t length = 0;
  for (std::string name, what, layer, routing; lines >> name >> what >> layer;) {
    if (what == "starts") {
      EXPECT_EQ(layer, "1");  // as many threads as ours
      continue;
    }
    lines >> routing;
    layers.insert(layer);
    routings.insert(routing);
    length = !turns.empty() && turns.back() == name ? length + 1 : 1;
    longest = std::max(longest, length);
    if (length == 1) turns.push_back(name);
  }
  // First the check, layer by layer, then the turns: the two change places again and again.
  EXPECT_GE(turns.size(), 6U);
  EXPECT_LE(longest, 1U + 2 * 100);  // a first call, and at most 100 steps of 2 layers
  EXPECT_EQ(layers, (std::set<std::string>{"0", "1"}));
  EXPECT_GE(routings.size(), 8U);  // the same routings as ours: several
}

TEST(Compare, EveryFailureHasItsReasonAndSparesTheRest) {
  const CommandResult result = compare("--compare");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(reason_of(result, "missing").find("pip install missing-peer"), std::string::npos);
  EXPECT_TRUE(peer_of(result, "missing")["version"].is_null());
  EXPECT_NE(reason_of(result, "wrong").find("does not match ours"), std::string::npos);
  EXPECT_NEAR(peer_of(result, "wrong")["rel_l2"], 0.05, 0.01);
  EXPECT_NE(reason_of(result, "dies").find("exit code 7: these are my last words"),
            std::string::npos);
  EXPECT_NE(reason_of(result, "garbage").find("'{ this is no JSON'"), std::string::npos);
  EXPECT_NE(reason_of(result, "raises").find("KeyError"), std::string::npos);
  EXPECT_EQ(reason_of(result, "refuses"), "hidden_size 16 is too small");
  for (const char* name : {"good_a", "good_b"}) {
    EXPECT_TRUE(peer_of(result, name).contains("time_us")) << name;
  }
  const nlohmann::json row = result.rows().at(0);
  EXPECT_GT(row["time_us"]["median"], 0.0);
  EXPECT_EQ(row["bit_equal"], true);
  // People are told how to get what is missing.
  EXPECT_NE(result.errors.find("pip install missing-peer"), std::string::npos);
}

TEST(Compare, AWrongPeerIsNotTimed) {
  const TestFolder folder;
  const std::string file = (folder / "log").string();
  const CommandResult result = compare("--compare wrong", "FAKE_PEER_LOG='" + file + "'");
  EXPECT_EQ(result.exit_code, 0);
  std::istringstream lines(read_file(file));
  int applies = 0;
  for (std::string line; std::getline(lines, line);) applies += line.find("apply") != line.npos;
  EXPECT_EQ(applies, 2);  // the check of each layer
}

TEST(Compare, AskedForByName) {
  const CommandResult missing = compare("--compare missing");
  EXPECT_EQ(missing.exit_code, 3);
  EXPECT_EQ(missing.output, "");
  EXPECT_NE(missing.errors.find("pip install missing-peer"), std::string::npos);
  EXPECT_NE(missing.errors.find("FUSEDMOE_PEERS_PYTHON"), std::string::npos);
  const CommandResult dies = compare("--compare good_a,dies");
  EXPECT_EQ(dies.exit_code, 3);
  EXPECT_TRUE(peer_of(dies, "good_a").contains("time_us"));  // rows come all the same
  const CommandResult unknown = compare("--compare nobody");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.errors.find("good_a, good_b"), std::string::npos);
  EXPECT_EQ(compare("--compare refuses").exit_code, 0);  // it is there: other layers may fit it
  EXPECT_EQ(compare("--compare good_a", "FUSEDMOE_PEERS_PYTHON=/no/such/python").exit_code, 3);
}

TEST(Compare, ThePageShowsPeers) {
  const TestFolder folder;
  const std::string file = (folder / "page.html").string();
  const CommandResult result = compare("--compare --html '" + file + "'");
  EXPECT_EQ(result.exit_code, 0);
  const std::string page = read_file(file);
  for (const char* text : {"\"name\":\"good_a\"", "\"version\":\"1.2.3\"",
                           "pip install missing-peer", "plain Python", "\"speedup\":"}) {
    EXPECT_NE(page.find(text), std::string::npos) << text;
  }
}

TEST(Compare, RelativeL2) {
  const float ours[] = {3, 0, 4};
  const float near[] = {3, 0.5, 4};
  const float none[] = {3, 0, NAN};
  const auto error = [&](const float* other) {
    return relative_l2(reinterpret_cast<const std::byte*>(other),
                       reinterpret_cast<const std::byte*>(ours), 3, DType::f32);
  };
  EXPECT_EQ(error(ours), 0);
  EXPECT_DOUBLE_EQ(error(near), 0.1);
  EXPECT_TRUE(std::isinf(error(none)));
}

TEST(PeerProcess, EndsWhatItStarted) {
  pid_t pid = -1;
  {
    PeerProcess deaf({"sleep", "1000"});  // does not read its stdin
    pid = deaf.pid();
    EXPECT_THROW(deaf.receive(0.05), PeerFailed);
    EXPECT_TRUE(wait_until_asleep(pid));
  }
  EXPECT_NE(kill(pid, 0), 0);  // no such process
  EXPECT_THROW(PeerProcess({"/no/such/program"}), PeerFailed);
}

TEST(PeerProcess, TellsWhoStillRuns) {
  PeerProcess spins({"sh", "-c", "while :; do :; done"});
  EXPECT_FALSE(wait_until_asleep(spins.pid()));
}

TEST(CpuUse, OwnWorkIsNotThatOfOthers) {
  const CpuUse use;
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(200)) {
  }
  EXPECT_GE(use.share_of_others(), 0);
  EXPECT_LE(use.share_of_others(), 1);
}

}  // namespace
}  // namespace fusedmoe::tool
