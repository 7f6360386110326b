// Goal: every way to start a rank is read right, and a contradictory environment is refused with
// the variable named. Method: tables of variables; expected values and texts by hand.

#include "comm/environment.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "tests/base/thrown.h"

namespace tessera::comm {
namespace {

using Variables = std::map<std::string, std::string>;

Environment detect(const Variables& variables) {
  return detect_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

std::string error_of(const Variables& variables) {
  return thrown<ConfigError>([&] { detect(variables); });
}

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

Variables torchrun() {
  return {{"RANK", "5"},
          {"WORLD_SIZE", "8"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "4"},
          {"MASTER_ADDR", "node0"},
          {"MASTER_PORT", "29500"},
          {"TORCHELASTIC_RUN_ID", "run-7"},
          {"TORCHELASTIC_RESTART_COUNT", "2"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
}

TEST(EnvironmentTest, WithoutVariablesThisIsOneProcess) {
  const Environment env = detect({{"PATH", "/bin"}, {"LOCAL_RANK", "3"}, {"MASTER_PORT", "x"}});
  EXPECT_EQ(env.source, "one process");
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.size, 1);
  EXPECT_EQ(env.local_rank, 0);
  EXPECT_EQ(env.local_size, 1);
  EXPECT_EQ(env.master_host, "");
  EXPECT_FALSE(env.store_is_served);
}

TEST(EnvironmentTest, ReadsAllVariablesOfTorchrun) {
  const Environment env = detect(torchrun());
  EXPECT_EQ(env.source, "torchrun");
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_size, 4);
  EXPECT_EQ(env.master_host, "node0");
  EXPECT_EQ(env.master_port, 29500);
  EXPECT_EQ(env.run_id, "run-7");
  EXPECT_EQ(env.restart, 2);
  EXPECT_TRUE(env.store_is_served);
}

TEST(EnvironmentTest, WhatOnlyElasticLaunchersSetHasStartValues) {
  const Environment env =
      detect({{"RANK", "1"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "65535"}});
  EXPECT_EQ(env.local_rank, 1) << "one host";
  EXPECT_EQ(env.local_size, 3);
  EXPECT_EQ(env.run_id, "none");
  EXPECT_EQ(env.restart, 0);
  EXPECT_FALSE(env.store_is_served);
}

TEST(EnvironmentTest, TheAgentServesTheStoreOnlyWhenItSaysTrue) {
  for (const char* value : {"False", "true", "", "1"}) {
    const auto variables = with(torchrun(), "TORCHELASTIC_USE_AGENT_STORE", value);
    EXPECT_FALSE(detect(variables).store_is_served) << value;
  }
}

TEST(EnvironmentTest, AWorldOfOneNeedsNoMeetingPlace) {
  const Environment env = detect({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(env.source, "torchrun");
  EXPECT_EQ(env.size, 1);
}

TEST(EnvironmentTest, RanksThatCannotMeetAreRefused) {
  const std::string missing = error_of(without(torchrun(), "MASTER_ADDR"));
  EXPECT_TRUE(contains(missing, "WORLD_SIZE=8 but MASTER_ADDR is not set")) << missing;
  const std::string empty = error_of(with(torchrun(), "MASTER_ADDR", ""));
  EXPECT_TRUE(contains(empty, "MASTER_ADDR is not set")) << empty;
  const std::string port = error_of(without(torchrun(), "MASTER_PORT"));
  EXPECT_TRUE(contains(port, "variable MASTER_PORT is not set")) << port;
}

TEST(EnvironmentTest, HalfOfAnEnvironmentIsRefusedWithTheMissingHalfNamed) {
  const std::string rank = error_of(without(torchrun(), "RANK"));
  EXPECT_TRUE(contains(rank, "variable RANK is not set")) << rank;
  EXPECT_TRUE(contains(rank, "tessera launch")) << rank;
  const std::string size = error_of(without(torchrun(), "WORLD_SIZE"));
  EXPECT_TRUE(contains(size, "variable WORLD_SIZE is not set")) << size;
}

TEST(EnvironmentTest, ARankOutsideTheWorldIsRefused) {
  for (const char* rank : {"8", "9", "2147483647"}) {
    const std::string text = error_of(with(torchrun(), "RANK", rank));
    EXPECT_TRUE(contains(text, std::string("RANK=") + rank)) << text;
    EXPECT_TRUE(contains(text, "less than WORLD_SIZE=8")) << text;
  }
  EXPECT_EQ(detect(with(torchrun(), "RANK", "7")).rank, 7);
}

TEST(EnvironmentTest, WhatIsNoWholeNumberInItsRangeIsRefusedWithNameAndValue) {
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"RANK", ""},
      {"RANK", "-1"},
      {"RANK", "one"},
      {"RANK", "1.5"},
      {"RANK", "1 "},
      {"RANK", "99999999999999999999"},
      {"WORLD_SIZE", "0"},
      {"WORLD_SIZE", "8x"},
      {"WORLD_SIZE", "4294967304"},  // 8 in 32 bits
      {"LOCAL_RANK", "a"},
      {"LOCAL_WORLD_SIZE", "0"},
      {"MASTER_PORT", "0"},
      {"MASTER_PORT", "65536"},
      {"MASTER_PORT", "http"},
      {"TORCHELASTIC_RESTART_COUNT", "-3"},
  };
  for (const auto& [name, value] : rows) {
    const std::string text = error_of(with(torchrun(), name, value));
    EXPECT_TRUE(contains(text, name + "='" + value + "': expected a whole number from ")) << text;
  }
}

TEST(EnvironmentTest, TheVariablesOfThisProcessAreReadByDefault) {
  for (const char* name : {"WORLD_SIZE", "RANK"}) ::unsetenv(name);
  EXPECT_EQ(detect_environment().source, "one process");
  ::setenv("WORLD_SIZE", "1", 1);
  ::setenv("RANK", "0", 1);
  EXPECT_EQ(detect_environment().source, "torchrun");
  for (const char* name : {"WORLD_SIZE", "RANK"}) ::unsetenv(name);
}

}  // namespace
}  // namespace tessera::comm
