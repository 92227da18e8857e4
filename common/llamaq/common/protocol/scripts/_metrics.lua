-- Counts what the metrics of a queue tell about its jobs. This file is put in front of `_lib.lua`.
--
-- Each partition has a hash `metrics` with counters, which `llamaq metrics` adds up. Its fields, where PRIORITY is
-- 'interactive' or 'bulk', and BOUND is the upper bound of a histogram's bucket: a number, or 'inf'.
--   attempts, retries, crashes              of all jobs
--   PRIORITY:submitted
--   PRIORITY:finished:REASON                ends by finish reason
--   PRIORITY:failed:CODE                    ends by error code
--   PRIORITY:duration_ms:BOUND, :sum        time from submit to the end
--   PRIORITY:queue_ms:BOUND, :sum           time from submit to the first slot, or to the end
--   PRIORITY:first_token_ms:BOUND, :sum     time from submit to the first token
--   PRIORITY:inter_token_ms:BOUND, :sum     time between two tokens
--   PRIORITY:prompt_tokens:BOUND, :sum      length of the prompt
--   PRIORITY:output_tokens:BOUND, :sum      length of the output
--   PRIORITY:computed, PRIORITY:cached:TIER prompt tokens of the last run
--   PRIORITY:lookups:TIER                   last runs by the tier of their cached tokens; 'none': there were none
--   about                                   a text. Redis stores a hash with a value of more than 64 bytes as a hash
--                                           table, in which it finds a field faster than in the packed form
--
-- For a job that was submitted for a later time, the times begin then.

local ABOUT = 'Counters of the jobs of this partition since it exists. The command `llamaq metrics` adds up all partitions.'

-- Bounds of the buckets of times in ms; JOB_TIMES_MS in metrics/buckets.py has the same.
local function job_times_ms()
  return {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000,
    2000000, 5000000, 10000000}
end
local MAX_LENGTH_BOUND = 1048576

local function metrics_key(job)
  return string.match(job, '^(.-}:)') .. 'metrics'
end

-- Counts one event of a job, and returns the counter. The function ignores errors of Redis, and returns a table then: a
-- counter must not stop a job.
local function count_one(job, name)
  return redis.pcall('HINCRBY', metrics_key(job), name, 1)
end

-- Adds numbers to counters. `counts` has a name and a number in turn. Two commands for all counters cost less than one
-- for each. Another client may have overwritten the key: then the counters begin again.
local function add_counts(job, counts)
  local key, names = metrics_key(job), {'about'}
  for i = 1, #counts, 2 do
    names[#names + 1] = counts[i]
  end
  local stored = redis.pcall('HMGET', key, unpack(names))
  if stored.err then
    redis.call('DEL', key)
    stored = {}
  end
  local values = {}
  for i = 2, #names do
    values[2 * i - 3], values[2 * i - 2] = names[i], (tonumber(stored[i] or '') or 0) + counts[2 * i - 2]
  end
  if not stored[1] then
    values[#values + 1], values[#values + 2] = 'about', ABOUT
  end
  redis.pcall('HSET', key, unpack(values))
end

-- Adds a value of a histogram to `counts`.
local function add_value(counts, name, bound, value)
  local at = #counts
  counts[at + 1], counts[at + 2] = name .. ':' .. bound, 1
  counts[at + 3], counts[at + 4] = name .. ':sum', value
end

local function add_time(counts, name, ms)
  for _, bound in ipairs(job_times_ms()) do
    if ms <= bound then
      return add_value(counts, name, bound, ms)
    end
  end
  add_value(counts, name, 'inf', ms)
end

local function add_length(counts, name, n_tokens)
  local bound = 1
  while bound < n_tokens and bound < MAX_LENGTH_BOUND do
    bound = 2 * bound
  end
  add_value(counts, name, bound < n_tokens and 'inf' or bound, n_tokens)
end

-- Adds the times of a job's tokens, 'FIRST LAST BOUND=COUNT ...' (see metrics/token_times.py).
local function add_token_times(counts, priority, token_times)
  local first, last, between = string.match(token_times, '^(%d+) (%d+)(.*)$')
  if not first then
    return
  end
  add_time(counts, priority .. 'first_token_ms', tonumber(first))
  for bound, count in string.gmatch(between, '(%w+)=(%d+)') do
    counts[#counts + 1], counts[#counts + 2] = priority .. 'inter_token_ms:' .. bound, tonumber(count)
  end
  counts[#counts + 1], counts[#counts + 2] = priority .. 'inter_token_ms:sum', math.max(0, last - first)
end

-- Adds the prompt of a job that a worker has prepared: 'PROMPT COMPUTED CACHED TIER', in tokens.
local function add_prompt(counts, priority, usage)
  local prompt, computed, cached, tier = string.match(usage, '^(%d+) (%d+) (%d+) (%a+)$')
  if not prompt then
    return
  end
  add_length(counts, priority .. 'prompt_tokens', tonumber(prompt))
  if tier == 'unused' then -- the job had no slot
    return
  end
  counts[#counts + 1], counts[#counts + 2] = priority .. 'computed', tonumber(computed)
  counts[#counts + 1], counts[#counts + 2] = priority .. 'lookups:' .. tier, 1
  if tier ~= 'none' then
    counts[#counts + 1], counts[#counts + 2] = priority .. 'cached:' .. tier, tonumber(cached)
  end
end

-- Counts a job that has just ended. Its hash is complete. `terminal` is the msgpack of its terminal event.
local function count_end(job, status, terminal)
  local state = redis.call('HMGET', job, 'priority', 'finish_reason', 'submitted_ms', 'waits_from_ms', 'started_ms',
    'finished_ms', 'generated', 'token_times', 'usage')
  local priority = state[1] == 'bulk' and 'bulk:' or 'interactive:'
  local reason = status == 'finished' and state[2] or cmsgpack.unpack(terminal).code
  local counts = {priority .. status .. ':' .. tostring(reason), 1}
  local finished = tonumber(state[6])
  local since = tonumber(state[4] or state[3] or '') or finished
  add_time(counts, priority .. 'duration_ms', math.max(0, finished - since))
  add_time(counts, priority .. 'queue_ms', math.max(0, (tonumber(state[5] or '') or finished) - since))
  add_length(counts, priority .. 'output_tokens', tonumber(state[7] or '') or 0)
  add_token_times(counts, priority, state[8] or '')
  add_prompt(counts, priority, state[9] or '')
  add_counts(job, counts)
end
