// Memory nodes: what the kernel's files say, what the environment makes of it, and how threads are
// spread over them.
#include "backends/cpu/numa.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "fusedmoe/error.h"
#include "support/environment.h"

namespace fusedmoe::cpu {
namespace {

// FUSEDMOE_NUMA_NODES for the length of a test.
struct NodesEnvironment : test::ScopedEnvironment {
  explicit NodesEnvironment(const char* value) : ScopedEnvironment("FUSEDMOE_NUMA_NODES", value) {}
};

// A copy of the folder in which the kernel describes nodes: id -> list of CPUs.
class Nodes {
 public:
  explicit Nodes(const std::map<int, std::string>& lists) {
    std::string name = (std::filesystem::temp_directory_path() / "fusedmoe-XXXXXX").string();
    root_ = ::mkdtemp(name.data());
    for (const auto& [id, list] : lists) {
      const std::string folder = root_ + "/sys/devices/system/node/node" + std::to_string(id);
      std::filesystem::create_directories(folder);
      std::ofstream(folder + "/cpulist") << list << "\n";
    }
  }
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;
  ~Nodes() { std::filesystem::remove_all(root_); }
  std::vector<NumaNode> read() const { return read_numa_nodes(root_); }

 private:
  std::string root_;
};

// The test may not run on all CPUs: those that it may.
class NumaTest : public testing::Test {
 protected:
  NumaTest() {
    CPU_ZERO(&allowed_);
    EXPECT_EQ(sched_getaffinity(0, sizeof(allowed_), &allowed_), 0);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed_)) cpus_.push_back(cpu);
    }
  }
  std::string cpu(std::size_t i) const { return std::to_string(cpus_[i]); }
  bool is_all(const cpu_set_t& set) const { return CPU_EQUAL(&set, &allowed_) != 0; }

  const NodesEnvironment none_{nullptr};
  cpu_set_t allowed_;
  std::vector<int> cpus_;
};

TEST_F(NumaTest, OneNodeWithTheseCpus) {
  const std::vector<NumaNode> nodes = Nodes({{0, "0-1023"}}).read();
  ASSERT_EQ(nodes.size(), 1U);
  EXPECT_EQ(nodes[0].id, 0);
  EXPECT_TRUE(is_all(nodes[0].cpus));
}

TEST_F(NumaTest, NoFilesIsOneNode) {
  const std::vector<NumaNode> nodes = Nodes({}).read();
  ASSERT_EQ(nodes.size(), 1U);
  EXPECT_EQ(nodes[0].id, -1);
  EXPECT_TRUE(is_all(nodes[0].cpus));
}

TEST_F(NumaTest, ListsAreSplitByNode) {
  if (cpus_.size() < 2) GTEST_SKIP() << "two CPUs are needed";
  // Ids with a gap, as of machines with a node switched off; ranges beyond the machine's CPUs.
  const std::string last = std::to_string(cpus_.back());
  const std::string rest = std::to_string(cpus_[1]) + "-" + last + ",2000-3000";
  const std::vector<NumaNode> nodes = Nodes({{0, cpu(0)}, {2, rest}}).read();
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_EQ(nodes[0].id, 0);
  EXPECT_EQ(CPU_COUNT(&nodes[0].cpus), 1);
  EXPECT_TRUE(CPU_ISSET(cpus_[0], &nodes[0].cpus));
  EXPECT_EQ(nodes[1].id, 2);
  EXPECT_EQ(CPU_COUNT(&nodes[1].cpus), static_cast<int>(cpus_.size()) - 1);
  EXPECT_FALSE(CPU_ISSET(cpus_[0], &nodes[1].cpus));
}

// "0-1,4": each range counts, and only CPUs that the process may use.
TEST_F(NumaTest, RangesAndSingleCpus) {
  const std::string list = "0-1,4," + std::to_string(cpus_.back()) + ",7-9";
  const std::vector<NumaNode> nodes = Nodes({{0, list}}).read();
  ASSERT_EQ(nodes.size(), 1U);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    const bool listed = cpu <= 1 || cpu == 4 || (cpu >= 7 && cpu <= 9) || cpu == cpus_.back();
    EXPECT_EQ(CPU_ISSET(cpu, &nodes[0].cpus) != 0, listed && CPU_ISSET(cpu, &allowed_)) << cpu;
  }
}

// Memory without CPUs, and CPUs that the process may not use, have no threads.
TEST_F(NumaTest, NodesWithoutCpusAreLeftOut) {
  const std::vector<NumaNode> nodes =
      Nodes({{0, ""}, {1, "0-1023"}, {2, ""}, {3, "1020-1023"}, {4, "x,-"}}).read();
  ASSERT_EQ(nodes.size(), CPU_ISSET(1023, &allowed_) != 0 ? 2U : 1U);
  EXPECT_EQ(nodes[0].id, 1);
  const std::vector<NumaNode> others = Nodes({{0, ""}, {1, "1020-1023"}}).read();
  ASSERT_EQ(others.size(), 1U);
  EXPECT_TRUE(CPU_ISSET(1023, &allowed_) != 0 || others[0].id == -1);
}

TEST_F(NumaTest, TheEnvironmentGivesAnotherNumber) {
  const Nodes one({{0, "0-1023"}});
  const Nodes two({{0, cpu(0)}, {1, cpu(cpus_.size() - 1)}});
  const std::size_t real = cpus_.size() < 2 ? 2U : two.read().size();
  {
    const NodesEnvironment off("1");
    EXPECT_EQ(one.read()[0].id, 0) << "a number that fits changes nothing";
    ASSERT_EQ(two.read().size(), 1U);
    EXPECT_EQ(two.read()[0].id, -1);
    EXPECT_TRUE(is_all(two.read()[0].cpus));
  }
  {
    const NodesEnvironment three("3");
    ASSERT_EQ(one.read().size(), 3U);
    for (const NumaNode& node : one.read()) {
      EXPECT_EQ(node.id, -1);
      EXPECT_TRUE(is_all(node.cpus));
    }
  }
  {
    const NodesEnvironment as_it_is("2");
    EXPECT_EQ(two.read()[0].id, real == 2 ? 0 : -1);
  }
  const NodesEnvironment empty("");
  EXPECT_EQ(one.read().size(), 1U);
  EXPECT_EQ(two.read().size(), real);
}

TEST_F(NumaTest, WhatIsNoNumberOfNodesIsRefused) {
  const Nodes one({{0, "0-1023"}});
  for (const std::string garbage : {"0", "-4", "many", " ", "2 ", "65", "100000", "99999999999"}) {
    const NodesEnvironment environment(garbage.c_str());
    try {
      one.read();
      ADD_FAILURE() << garbage;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(std::string(error.what()),
                "FUSEDMOE_NUMA_NODES: expected a number from 1 to 64, got '" + garbage +
                    "'; set 1 to turn placement off, or unset it");
    }
  }
}

TEST_F(NumaTest, ThisMachineHasAtLeastOne) {
  ASSERT_GE(numa_nodes().size(), 1U);
  EXPECT_EQ(&numa_nodes(), &numa_nodes());
  for (const NumaNode& node : numa_nodes()) EXPECT_GE(CPU_COUNT(&node.cpus), 1);
}

// With one node, a thread stays free to run anywhere, and memory anywhere.
TEST_F(NumaTest, BindingToTheOnlyNodeDoesNothing) {
  if (numa_nodes().size() > 1) GTEST_SKIP() << "this machine has several";
  bind_thread(0);
  bind_thread(5);
  cpu_set_t after;
  ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
  EXPECT_TRUE(is_all(after));
  std::vector<std::byte> memory(100, std::byte{7});
  bind_memory(memory.data(), memory.size(), 0);
  EXPECT_EQ(memory[99], std::byte{7});
}

}  // namespace
}  // namespace fusedmoe::cpu
