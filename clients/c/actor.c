/* An actor of ddrl in C: plays CartPole for a run whose policy is a DQN with a ReLU network. Written from docs/wire.md.

       cc -O3 -o actor actor.c -lhiredis -lm
       DDRL_USER=ddrl-worker DDRL_PASSWORD=... ./actor HOST PORT RUN      # or the path of a socket for HOST

   It ends when the run ends. Every call has a deadline; after an outage it connects again and repeats its last append,
   which the server counts once. */

#include <hiredis/hiredis.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { N = 8, MOST_T = 64, O = 4, ACTIONS = 2, LAYERS = 8, WIDTH = 4096, COLUMNS = 11, OVERHEAD = 128, LIMIT = 500 };

static void fail(const char *format, ...) {
  va_list args;
  va_start(args, format);
  fprintf(stderr, "actor: error: ");
  vfprintf(stderr, format, args);
  fputs("\n", stderr), exit(1);
}

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec + 1e-9 * at.tv_nsec;
}

/* --- the environment: Barto, Sutton and Anderson 1983, as gymnasium's CartPole-v1 ----------------------- */

typedef struct {
  double at[O]; /* position, speed, angle, angular speed */
  int steps;
} Pole;

static void begin(Pole *pole) {
  for (int i = 0; i < O; i++) pole->at[i] = 0.1 * drand48() - 0.05;
  pole->steps = 0;
}

static void observe(const Pole *pole, float *row) {
  for (int i = 0; i < O; i++) row[i] = pole->at[i];
}

/* Take a step of 0.02 s; return whether the pole fell or the cart left the track. */
static int step(Pole *pole, int64_t action) {
  double *at = pole->at, cosine = cos(at[2]), sine = sin(at[2]);
  double push = ((action ? 10 : -10) + 0.05 * at[3] * at[3] * sine) / 1.1;
  double turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1));
  const double change[O] = {at[1], push - 0.05 * turn * cosine / 1.1, at[3], turn};
  for (int i = 0; i < O; i++) at[i] += 0.02 * change[i];
  pole->steps++;
  return fabs(at[0]) > 2.4 || fabs(at[2]) > 12 * 2 * M_PI / 360;
}

/* --- the policy: safetensors, a layer after another ------------------------------------------------------ */

static struct {
  long version;
  int num_layers, sizes[LAYERS + 1];
  float epsilon, *weight[LAYERS], *bias[LAYERS];
  char *blob;
} policy = {.version = -1};

/* Return a tensor of the blob, NULL if there is none; its first two sizes go to `shape`. */
static float *tensor(const char *name, int *shape) {
  uint64_t length;
  char quoted[80];
  memcpy(&length, policy.blob, 8);
  snprintf(quoted, sizeof quoted, "\"%s\":", name);
  char *entry = strstr(policy.blob + 8, quoted);
  if (!entry || entry > policy.blob + 8 + length) return NULL;
  sscanf(strstr(entry, "\"shape\":[") + 9, "%d,%d", &shape[0], &shape[1]);
  return (float *)(policy.blob + 8 + length + strtoull(strstr(entry, "\"data_offsets\":[") + 16, NULL, 10));
}

/* Add a layer; its weight is turned to [in, out], so that the loop over outputs is one over neighbors. */
static int add_layer(const char *of) {
  char name[80];
  int shape[2], i = policy.num_layers;
  snprintf(name, sizeof name, "%s.weight", of);
  float *given = tensor(name, shape);
  if (!given || i == LAYERS || shape[0] > WIDTH || (i && shape[1] != policy.sizes[i])) return 0;
  policy.weight[i] = realloc(policy.weight[i], 4ul * shape[0] * shape[1]);
  for (int k = 0; k < shape[0] * shape[1]; k++) policy.weight[i][k % shape[1] * shape[0] + k / shape[1]] = given[k];
  policy.sizes[i] = shape[1], policy.sizes[i + 1] = shape[0];
  snprintf(name, sizeof name, "%s.bias", of);
  return policy.bias[i] = tensor(name, shape), ++policy.num_layers;
}

static void load(long version, const char *data, size_t length) {
  memcpy(policy.blob = realloc(policy.blob, length + 1), data, length);
  policy.blob[length] = 0;
  policy.version = version, policy.num_layers = 0;
  char name[80];
  do snprintf(name, sizeof name, "trunk.layers.%d", policy.num_layers);
  while (add_layer(name));
  int shape[2], known = policy.num_layers && add_layer("head.advantage");
  float *epsilon = tensor("epsilon", shape);
  if (!known || !epsilon || policy.sizes[0] != O || policy.sizes[policy.num_layers] != ACTIONS)
    fail("version %ld: its network is not a DQN's of %d inputs, %d actions and layers of up to %d", version, O, ACTIONS,
         WIDTH);
  policy.epsilon = *epsilon;
}

static int64_t act(const float *row) {
  static float buffers[2][WIDTH];
  const float *in = row;
  if (drand48() < policy.epsilon) return lrand48() % ACTIONS;
  for (int layer = 0; layer < policy.num_layers; layer++) {
    int width = policy.sizes[layer], height = policy.sizes[layer + 1];
    float *restrict out = memcpy(buffers[layer % 2], policy.bias[layer], 4ul * height), *weight = policy.weight[layer];
    for (int j = 0; j < width; j++, weight += height)
      if (in[j] != 0)
        for (int i = 0; i < height; i++) out[i] += weight[i] * in[j];
    for (int i = 0; i < height && layer < policy.num_layers - 1; i++) out[i] = out[i] > 0 ? out[i] : 0;
    in = out;
  }
  return in[1] > in[0];
}

/* --- a fragment: columns as chunks of blosc2 that are not compressed -------------------------------------- */

static float observation[MOST_T + 1][N][O], reward[MOST_T][N], final_observation[MOST_T * N][O];
static float episode_return[MOST_T * N];
static int64_t action[MOST_T][N], reset_seed[(MOST_T + 1) * N];
static uint8_t terminated[MOST_T][N], truncated[MOST_T][N];
static int32_t final_index[MOST_T * N][2], episode_length[MOST_T * N], reset_index[(MOST_T + 1) * N][2];
static char header[8192], returns[16384];
static struct {
  const char *name;
  char *data;
  size_t length;
} fields[COLUMNS + 1];
static int num_fields;
static uint32_t checksum;

static uint32_t crc32(uint32_t crc, const uint8_t *data, size_t length) {
  for (crc = ~crc; length--; data++)
    for (int bit = (crc ^= *data, 0); bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  return ~crc;
}

/* Add a column to the header, and if it is not empty its chunk to the fields. */
static void column(const char *name, const char *dtype, const char *shape, const void *data, size_t bytes) {
  snprintf(header + strlen(header), sizeof header - strlen(header),
           "%s{\"name\":\"%s\",\"dtype\":\"%s\",\"shape\":[%s],\"bytes\":%zu}",
           header[strlen(header) - 1] == '[' ? "" : ",", name, dtype, shape, bytes);
  if (!bytes) return;
  char *chunk = calloc(1, bytes + 32);
  uint32_t sizes[] = {bytes, bytes, bytes + 32};
  memcpy(chunk, "\5\1\7\1", 4); /* format of the chunk and of the codec, flags: stored, size of a number */
  memcpy(chunk + 4, sizes, 12);
  memcpy(chunk + 32, data, bytes);
  checksum = crc32(checksum, (uint8_t *)chunk, bytes + 32);
  fields[num_fields].name = name, fields[num_fields].data = chunk, fields[num_fields++].length = bytes + 32;
}

/* Play T steps of N environments, and make the fields of the fragment. */
static void play(Pole *poles, int T, const char *run, const unsigned long long *who) {
  int K = 0, E = 0, R = 0;
  char shape[64];
  for (int lane = 0; lane < N && !who[2]; lane++) begin(&poles[lane]), reset_index[R][0] = 0, reset_index[R++][1] = lane;
  for (int lane = 0; lane < N; lane++) observe(&poles[lane], observation[0][lane]);
  for (int t = 0; t < T; t++)
    for (int lane = 0; lane < N; lane++) {
      Pole *pole = &poles[lane];
      action[t][lane] = act(observation[t][lane]);
      terminated[t][lane] = step(pole, action[t][lane]);
      truncated[t][lane] = !terminated[t][lane] && pole->steps == LIMIT;
      reward[t][lane] = 1;
      if (truncated[t][lane])
        observe(pole, final_observation[K]), final_index[K][0] = t, final_index[K++][1] = lane;
      if (terminated[t][lane] || truncated[t][lane]) {
        episode_return[E] = pole->steps, episode_length[E++] = pole->steps;
        begin(pole), reset_index[R][0] = t + 1, reset_index[R++][1] = lane;
      }
      observe(pole, observation[t + 1][lane]);
    }
  for (int i = 0; i < R; i++) reset_seed[i] = -1;
  strcpy(returns, E ? "[" : "");
  for (int i = 0; i < E; i++) sprintf(returns + strlen(returns), "%g%c", episode_return[i], i < E - 1 ? ',' : ']');
  while (num_fields) free(fields[--num_fields].data);
  checksum = 0;
  snprintf(header, sizeof header,
           "{\"format\":1,\"run\":\"%s\",\"producer\":%llu,\"incarnation\":%llu,\"seq\":%llu,\"policy_version\":%ld,"
           "\"host\":\"c\",\"T\":%d,\"N\":%d,\"C\":0,\"columns\":[",
           run, who[0], who[1], who[2], policy.version, T, N);
#define SHAPE(...) (snprintf(shape, sizeof shape, __VA_ARGS__), shape)
  column("observation", "float32", SHAPE("%d,%d,%d", T + 1, N, O), observation, 4ul * (T + 1) * N * O);
  column("action", "int64", SHAPE("%d,%d", T, N), action, 8ul * T * N);
  column("reward", "float32", shape, reward, 4ul * T * N);
  column("terminated", "bool", shape, terminated, 1ul * T * N);
  column("truncated", "bool", shape, truncated, 1ul * T * N);
  column("final_index", "int32", SHAPE("%d,2", K), final_index, 8ul * K);
  column("final_observation", "float32", SHAPE("%d,%d", K, O), final_observation, 4ul * K * O);
  column("episode_return", "float32", SHAPE("%d", E), episode_return, 4ul * E);
  column("episode_length", "int32", shape, episode_length, 4ul * E);
  column("reset_index", "int32", SHAPE("%d,2", R), reset_index, 8ul * R);
  column("reset_seed", "int64", SHAPE("%d", R), reset_seed, 8ul * R);
  sprintf(header + strlen(header), "],\"checksum\":%u}", checksum);
}

/* --- the server -------------------------------------------------------------------------------------------- */

static redisContext *server;
static const char *host;
static int port, is_ready, is_told; /* logged in; of an outage */

/* Send a command; connect first where there is no connection. NULL after an outage, in which it waits a moment. */
static redisReply *ask(int argc, const char **argv, const size_t *lengths) {
  struct timeval deadline = {10, 0};
  const char *user = getenv("DDRL_USER"), *password = getenv("DDRL_PASSWORD");
  redisReply *reply = NULL;
  if (!server)
    server = *host == '/' ? redisConnectUnixWithTimeout(host, deadline) : redisConnectWithTimeout(host, port, deadline);
  if (server && !server->err && !is_ready) {
    redisSetTimeout(server, deadline);
    if (password) reply = redisCommand(server, "AUTH %s %s", user ? user : "default", password);
    if (reply && reply->type == REDIS_REPLY_ERROR) fail("%s:%d: %s", host, port, reply->str);
    freeReplyObject(reply);
    is_ready = 1;
  }
  reply = server && !server->err ? redisCommandArgv(server, argc, argv, lengths) : NULL;
  if (reply && reply->type != REDIS_REPLY_ERROR) return reply;
  static const char *passing[] = {"NOSCRIPT", "LOADING",    "OOM",        "BUSY",     "MISCONF",
                                  "READONLY", "NOREPLICAS", "MASTERDOWN", "UNBLOCKED"};
  int comes_back = !reply;
  for (size_t i = 0; reply && i < sizeof passing / sizeof *passing; i++)
    comes_back |= !strncmp(reply->str, passing[i], strlen(passing[i]));
  if (!comes_back) fail("the server refuses %s: %s", argv[0], reply->str);
  if (reply || !server) freeReplyObject(reply);
  else redisFree(server), server = NULL, is_ready = 0;
  if (!server && !is_told) is_told = fprintf(stderr, "actor: %s:%d does not answer; asks again\n", host, port);
  usleep(500000);
  return NULL;
}

/* Return the answer to a command of words, however long the server is away; the caller frees it. */
static redisReply *get(int argc, ...) {
  const char *words[8];
  va_list args;
  va_start(args, argc);
  for (int i = 0; i < argc; i++) words[i] = va_arg(args, const char *);
  va_end(args);
  for (redisReply *reply;;)
    if ((reply = ask(argc, words, NULL))) return reply;
}

/* Return a field of the run, "" if there is none; valid until the next call. */
static const char *field(const char *run, const char *of, const char *name) {
  static redisReply *last;
  char key[300];
  if (last) freeReplyObject(last);
  snprintf(key, sizeof key, "ddrl:{%s}:%s", run, of);
  last = get(3, "HGET", key, name);
  return last->type == REDIS_REPLY_STRING ? last->str : "";
}

/* Return what follows a name in a text, "" if it is not there. */
static const char *after(const char *text, const char *name) {
  const char *found = strstr(text, name);
  return found ? found + strlen(name) : "";
}

/* Refuse a run of another network, or of smaller fragments; return the most steps of one. */
static int longest(const char *run) {
  char key[300];
  snprintf(key, sizeof key, "ddrl:{%s}:spec", run);
  redisReply *reply = get(2, "GET", key);
  const char *spec = reply->type == REDIS_REPLY_STRING ? reply->str : "";
  const char *algorithm = after(spec, "\"algorithm\":{");
  const char *activation = after(algorithm, "\"activation\":"), *norm = after(algorithm, "\"norm\":");
  long num_envs = atol(after(spec, "\"num_envs\":")), most = atol(after(spec, "\"max_fragment_steps\":"));
  int is_plain = (!*activation || !strncmp(activation, "\"relu\"", 6)) && (!*norm || !strncmp(norm, "\"none\"", 6));
  if (!*after(algorithm, "\"name\":\"dqn\"") || !is_plain)
    fail("run %s: its policy is not a DQN of plain layers with ReLU", run);
  if (num_envs < N) fail("run %s: takes fragments of %ld environments, this actor's have %d", run, num_envs, N);
  freeReplyObject(reply);
  return most < MOST_T ? most : MOST_T;
}

/* Wait until the run wants steps; return how many, 0 once it has ended. Its newest version goes to `version`. */
static long await_turn(const char *run, long *version) {
  char after[64], key[300];
  snprintf(key, sizeof key, "ddrl:{%s}:allowance", run);
  for (;;) {
    snprintf(after, sizeof after, "%s", field(run, "state", "allowance_id"));
    long left = atol(field(run, "state", "allowance")), players = atol(field(run, "state", "players"));
    left -= atol(field(run, "counts", "appended_steps"));
    *version = atol(field(run, "state", "version"));
    const char *status = field(run, "state", "status");
    if (strcmp(status, "active") && strcmp(status, "paused")) return 0;
    if (*status == 'p' || *version < 0) usleep(200000);
    else if (left > 0) return players > 1 ? (left + 2 * players - 1) / (2 * players) : left;
    else freeReplyObject(get(6, "XREAD", "BLOCK", "500", "STREAMS", key, after));
  }
}

/* Play with a version of the weights, if the server still keeps it. */
static void use(const char *run, long version) {
  char key[300];
  if (version == policy.version) return;
  snprintf(key, sizeof key, "ddrl:{%s}:weights:%ld", run, version);
  redisReply *reply = get(2, "GET", key);
  if (reply->type == REDIS_REPLY_STRING) load(version, reply->str, reply->len);
  freeReplyObject(reply);
}

/* Append the fragment; the reply is {answer, version, id of the allowance, steps to append next}. */
static redisReply *append(const char *run, const char *sha, const unsigned long long who[4], double played_s,
                          double process_s) {
  enum { MOST = 3 + 6 + 14 + 2 * (COLUMNS + 1) };
  static char texts[20][300];
  const char *of_run[] = {"state", "counts", "experience", "episodes", "draining", "producers"}, *words[MOST];
  size_t lengths[MOST], size = OVERHEAD + 1 + strlen(header);
  int argc = 0, text = 0;
  for (int i = 0; i < num_fields; i++) size += strlen(fields[i].name) + fields[i].length;
  words[argc++] = "EVALSHA", words[argc++] = sha, words[argc++] = "6";
#define WORD(...) (snprintf(texts[text], 300, __VA_ARGS__), words[argc++] = texts[text++])
  for (int i = 0; i < 6; i++) WORD("ddrl:{%s}:%s", run, of_run[i]);
  for (int i = 0; i < 4; i++) WORD("%llu", who[i]); /* producer, incarnation, seq, transitions */
  WORD("%zu", size), WORD("%.0f", 1e3 * played_s);
  words[argc++] = "c", words[argc++] = "-", words[argc++] = "0", words[argc++] = returns, words[argc++] = "20000";
  WORD("%.0f", 1e3 * process_s);
  words[argc++] = "0", words[argc++] = "0", words[argc++] = "h", words[argc++] = header;
  for (int i = 0; i < argc; i++) lengths[i] = strlen(words[i]);
  for (int i = 0; i < num_fields; i++) {
    words[argc] = fields[i].name, lengths[argc++] = strlen(fields[i].name);
    words[argc] = fields[i].data, lengths[argc++] = fields[i].length;
  }
  for (redisReply *reply;;)
    if ((reply = ask(argc, words, lengths))) return reply;
}

int main(int argc, char **argv) {
  if (argc != 4) fail("use: actor HOST PORT RUN");
  host = argv[1], port = atoi(argv[2]);
  const char *run = argv[3], *wire = field(run, "state", "wire"), *found = strstr(wire, "\"append\": \"");
  char sha[41] = "";
  int format = 0;
  if (!*wire) fail("run %s: not on this server", run);
  sscanf(wire, "{\"format\": %d", &format);
  if (format != 1) fail("run %s: speaks format %d, this actor 1; use a newer actor", run, format);
  if (found) snprintf(sha, sizeof sha, "%.40s", found + 11);
  if (!strstr(field(run, "state", "spaces"), "\"env_id\": \"CartPole-v1\""))
    fail("run %s: does not play CartPole-v1", run);
  int most_T = longest(run);
  redisReply *reply = get(2, "INCR", "ddrl:producers");
  srand48(reply->integer << 16 ^ time(NULL) << 8 ^ getpid());
  unsigned long long who[4] = {reply->integer, (uint64_t)lrand48() << 16 ^ lrand48(), 0, 0}, num_steps = 0;
  freeReplyObject(reply);
  Pole poles[N];
  double started = now(), reported = started;
  for (long version = -1, left = 0; left > 0 || (left = await_turn(run, &version)) > 0; who[2]++) {
    for (use(run, version); policy.version < 0; use(run, version)) version = atol(field(run, "state", "version"));
    int T = left / N < 1 ? 1 : left / N > most_T ? most_T : left / N, is_full = 1;
    double began = now();
    play(poles, T, run, who);
    double played_s = now() - began;
    for (num_steps += who[3] = T * N; is_full;) {
      reply = append(run, sha, who, played_s, now() - reported);
      if ((is_full = !strcmp(reply->element[0]->str, "FULL"))) freeReplyObject(reply), usleep(250000);
    }
    char answer = *reply->element[0]->str; /* GO, WAIT, YIELD or STOPPED */
    reported = now(), version = reply->element[1]->integer, left = answer == 'G' ? reply->element[3]->integer : 0;
    freeReplyObject(reply);
    if (answer == 'S') break;
  }
  printf("%llu steps in %.1f s: %.0f steps/s\n", num_steps, now() - started, num_steps / (now() - started));
  return 0;
}
