// Goal: the command line: exit codes, messages, what reaches the command and the launched program.
// Method: the program itself is run through a shell; nothing here trains.

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "apps/config.h"
#include "base/error.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;
  std::string out;
  std::string err;
};

class Tessera : public testing::Test {
 protected:
  Tessera() {
    std::string pattern = (fs::path(testing::TempDir()) / "tessera_XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    program_ = fs::absolute("apps/tessera").string();  // tests start at the workspace's root
  }
  ~Tessera() override { fs::remove_all(folder_); }

  // `arguments` as the shell reads them.
  Outcome run(const std::string& arguments) const {
    const std::string out = (folder_ / "out").string();
    const std::string err = (folder_ / "err").string();
    const int status = std::system(
        (program_ + " " + arguments + " > " + out + " 2> " + err + " < /dev/null").c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read(out), read(err)};
  }

  static std::string read(const fs::path& path) {
    std::ifstream in(path);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }

  fs::path folder_;
  std::string program_;
};

#define EXPECT_SAYS(message, part) \
  EXPECT_NE((message).find(part), std::string::npos) << "the text is: " << (message)

TEST_F(Tessera, HelpTeachesAndEndsWithZero) {
  Outcome help = run("--help");
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_SAYS(help.out, "tessera launch --nproc-per-node 2 -- tessera train run.toml");
  EXPECT_SAYS(help.out, "Exit codes:");
  help = run("train --help");
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_SAYS(help.out, config_help());
  EXPECT_EQ(run("launch --help").exit_code, 0);
  EXPECT_EQ(run("prepare --help").exit_code, 0);
  EXPECT_EQ(run("--version").out, "tessera 0.1.0\n");
  help = run("");
  EXPECT_EQ(help.exit_code, 2);
  EXPECT_EQ(help.out, "");
  EXPECT_SAYS(help.err, "Examples:");
}

TEST_F(Tessera, WrongUsageEndsWithTwoAndOneLine) {
  const std::pair<const char*, const char*> cases[] = {
      {"trian", "Did you mean 'train'?"},
      {"train --steps 3", "Did you mean --training.steps?"},
      {"train --training.stpes=3", "Did you mean 'training.steps'?"},
      {"train --training.steps", "the value is missing"},
      {"train one.toml two.toml", "two.toml"},
      {"train missing.toml", "missing.toml"},
      {"train", "training.dataset_path is not set"},
      {"train --training.global_batch_size 3", "not a multiple"},
      {"prepare --output x", "PATH is required"},
      {"prepare --output x no-such-file", "no-such-file"},
      {"launch true", "--nproc-per-node"},
      {"launch --nproc-per-node 2", "no program to launch"},
      {"launch --nproc-per-node two true", "two"},
      {"launch --bogus 3 --nproc-per-node 1 true", "--bogus"},
  };
  for (const auto& [arguments, expected] : cases) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(outcome.err.rfind("tessera: error: ", 0), 0u) << outcome.err;
    EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
    EXPECT_SAYS(outcome.err, expected);
  }
}

TEST_F(Tessera, PrintsTheConfigThatResultsFromFileAndOverrides) {
  const std::string file = (folder_ / "run.toml").string();
  std::ofstream(file) << "[training]\nsteps = 3\nseq_len = 17\n";
  // The file in the middle and values of both forms: none may be taken for another.
  const Outcome outcome = run("train --training.steps 12 " + file +
                              " --training.global_batch_size -1 --print-config "
                              "--optimizer.lr=0.5 --job.description 'two words'");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  JobConfig expected;
  expected.training.steps = 12;
  expected.training.seq_len = 17;
  expected.optimizer.lr = 0.5;
  expected.job.description = "two words";
  EXPECT_EQ(outcome.out, print_config(expected));

  const Outcome invalid = run("train --print-config --lr_scheduler.warmup_steps=9999");
  EXPECT_EQ(invalid.exit_code, 2);
  EXPECT_SAYS(invalid.out, "warmup_steps = 9999");
  EXPECT_SAYS(invalid.err, "is more than training.steps");
}

TEST_F(Tessera, PreparesTokens) {
  const fs::path text = folder_ / "text";
  fs::create_directories(text);
  std::ofstream(text / "a.txt") << "hello";
  std::ofstream(text / "b.md") << "not this one";
  const std::string data = (folder_ / "data").string();
  const Outcome outcome =
      run("prepare --output " + data + " --extensions .txt,.h " + text.string());
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_SAYS(outcome.out, "training: 6 tokens of 1 documents");
  EXPECT_TRUE(fs::exists(fs::path(data) / "train.bin"));
  EXPECT_TRUE(fs::exists(fs::path(data) / "meta.json"));
}

TEST_F(Tessera, LaunchPassesTheProgramsArgumentsOnUntouched) {
  const std::string arguments = "--nproc-per-node 9 --help -- -x '' 'a b'";
  const std::string shown = "[--nproc-per-node][9][--help][--][-x][][a b]\n";
  for (const char* before : {"--nproc-per-node 2 --", "--nproc-per-node=2", "--nproc-per-node 2"}) {
    const Outcome outcome = run("launch --log-dir " + folder_.string() + " " + before + " sh -c '" +
                                "printf \"[%s]\" \"$@\"; echo" + "' name " + arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(read(folder_ / "rank_00000.log"), shown) << before;
    EXPECT_EQ(read(folder_ / "rank_00001.log"), shown) << before;
  }
}

TEST_F(Tessera, LaunchReturnsTheCodeOfTheRankThatFailed) {
  EXPECT_EQ(run("launch --nproc-per-node 2 sh -c 'exit $((RANK * 5))'").exit_code, 5);
  EXPECT_EQ(run("launch --nproc-per-node 1 sh -c 'kill -9 $$'").exit_code, 137);
  const Outcome missing = run("launch --nproc-per-node 3 no-such-program");
  EXPECT_EQ(missing.exit_code, 127);
  EXPECT_EQ(missing.err.find("no-such-program"), missing.err.rfind("no-such-program"));
}

TEST_F(Tessera, LaunchFindsItselfAndItsRanksSayWhoTheyAre) {
  const Outcome outcome = run("launch --nproc-per-node 1 -- tessera train missing.toml");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_SAYS(outcome.err, "tessera: error: [rank 0] cannot open the configuration file");
  EXPECT_SAYS(outcome.err, "rank 0 (pid ");
}

}  // namespace
}  // namespace tessera::apps
