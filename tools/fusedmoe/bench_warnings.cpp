#include "bench_warnings.h"

#include <fmt/core.h>

#include <algorithm>
#include <fstream>

#include "cpu_facts.h"
#include "probes.h"

namespace fusedmoe::tool {
namespace {

// On a quiet machine the median step takes less than 1.1 x the fastest, and probes differ by less
// than 5 %. A single slow step among hundreds says nothing, so the slowest does not count.
constexpr double kNoisySpread = 1.3;
constexpr double kNoisyDrift = 0.1;
// Of the CPUs' time. The system's own housekeeping stays below 2 %.
constexpr double kBusyOthers = 0.05;
// Below this many caches a step finds weights that the step before left there.
constexpr double kFewCaches = 3;

const WarningFacts& worst(const std::vector<WarningFacts>& rows, double WarningFacts::*fact) {
  return *std::max_element(
      rows.begin(), rows.end(),
      [&](const WarningFacts& a, const WarningFacts& b) { return a.*fact < b.*fact; });
}

// "powersave", "schedutil", ...; empty where the kernel does not scale frequencies, as in most
// virtual machines.
std::string frequency_governor() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
  std::string name;
  file >> name;
  return name;
}

}  // namespace

WarningFacts warning_facts(const BenchSetup& setup, const StepResult& result) {
  WarningFacts facts;
  facts.where = fmt::format("{}, {} token{}", setup.shape.name, result.num_tokens,
                            result.num_tokens == 1 ? "" : "s");
  facts.drift = result.drift;
  facts.others = result.others;
  facts.caches = result.step_bytes / static_cast<double>(last_level_cache_bytes());
  facts.threads = setup.threads;
  for (const PeerResult& peer : result.peers) {
    if (!peer.parked) facts.unparked = peer.name;
  }
  for (const ModeResult& mode : result.modes) {
    facts.spread = std::max(facts.spread, mode.time_us.median / mode.time_us.min);
  }
  return facts;
}

std::vector<std::string> warnings(const std::vector<WarningFacts>& rows) {
  std::vector<std::string> texts;
  if (rows.empty()) return texts;
#ifndef __OPTIMIZE__
  texts.emplace_back(
      "this build is not optimised, so its times say nothing. Configure with "
      "-DCMAKE_BUILD_TYPE=Release and build again");
#endif
  const WarningFacts& busy = worst(rows, &WarningFacts::others);
  if (busy.others > kBusyOthers) {
    texts.push_back(fmt::format(
        "other programs, or other machines of the same host, took up to {:.0f} % of the CPUs' time "
        "while rows were timed (most: {}). Stop them and run it again; until then compare rows of "
        "this run only",
        100 * busy.others, busy.where));
  }
  const WarningFacts& drift = worst(rows, &WarningFacts::drift);
  if (drift.drift > kNoisyDrift) {
    texts.push_back(fmt::format(
        "the machine changed while it was measured: the probes before and after a row differ by up "
        "to {:.0f} % (most: {}), and so may its floor. Run it again in a quiet minute, and give "
        "the host's memory bandwidth to nobody else",
        100 * drift.drift, drift.where));
  }
  const WarningFacts& spread = worst(rows, &WarningFacts::spread);
  if (spread.spread > kNoisySpread) {
    texts.push_back(fmt::format(
        "steps of one row differ: the median took up to {:.1f} x the fastest (most: {}). Stop "
        "other programs, or leave them a CPU with --threads {}",
        spread.spread, spread.where, std::max(spread.threads - 1, 1)));
  }
  const auto coldest = std::min_element(
      rows.begin(), rows.end(),
      [](const WarningFacts& a, const WarningFacts& b) { return a.caches < b.caches; });
  if (coldest->caches < kFewCaches) {
    texts.push_back(fmt::format(
        "a step reads only {:.1f} x the last-level cache (least: {}), so weights stay there from "
        "step to step and the ratio may fall below 1. Take more --layers",
        coldest->caches, coldest->where));
  }
  for (const WarningFacts& row : rows) {
    if (row.unparked.empty()) continue;
    texts.push_back(fmt::format(
        "threads of {} and of fusedmoe ran at the same time ({}), so both were slower than they "
        "are alone. Let its threads sleep after work: OMP_WAIT_POLICY=passive or KMP_BLOCKTIME=0",
        row.unparked, row.where));
    break;
  }
  if (rows[0].threads > cpu_threads()) {
    texts.push_back(fmt::format(
        "{} threads share {} CPUs, so they wait for each other. Take --threads {}, or 0 for all",
        rows[0].threads, cpu_threads(), cpu_threads()));
  }
  const std::string governor = frequency_governor();
  if (!governor.empty() && governor != "performance") {
    texts.push_back(fmt::format(
        "the CPUs' frequency follows the load (governor '{}'), so short rows run slower than they "
        "could. Set it with `cpupower frequency-set -g performance`",
        governor));
  }
  return texts;
}

}  // namespace fusedmoe::tool
