-- Ends jobs of one partition, each in one step: emits its last tokens and its terminal event, stores its stats and output, and
-- drops its entry. This works also when Redis is full: the end of a job frees more memory than it needs.
--
-- KEYS[1]  dead  stream of dead letters of the partition
--
-- Keys of job i, where i counts from 0:
-- KEYS[3i+2]  job      hash of the job
-- KEYS[3i+3]  events   stream of the job's events
-- KEYS[3i+4]  stream   job stream that the job was claimed from
--
-- ARGV[1]  worker    id of the caller
-- ARGV[2]  group     consumer group of the job streams
-- ARGV[3]  dead_ttl  shortest life of a dead job's keys, in ms
-- ARGV[4]  max_dead  number of entries stored in the stream of dead letters
-- ARGV[5]  values    msgpack of an array with 13 values for each job
--     1  attempt      number of the caller's attempt
--     2  entry        id of the job's entry
--     3  channel      channel of the job's events
--     4  id           id of the job
--     5  payload      msgpack of the event `tokens` with the tokens since the last flush; '': there are none
--     6  offset       number of tokens of the job before those in the payload
--     7  count        number of tokens in the payload
--     8  terminal     msgpack of the terminal event
--     9  status       'finished' | 'failed'
--     10 has_started  whether the job has had a slot in this attempt
--     11 reason       reason of the dead letter that the job becomes; '': none
--     12 fields       array of further fields of the hash: name, value, name, value, ...
--     13 progress     array with the msgpack of the events `prompt_progress` since the last flush
--
-- Returns an array with one value for each job:
--     'ok'             the job has ended
--     'lost'           a newer attempt exists, or the job has ended, perhaps by an earlier try of this call
--     a number         the number of tokens that Redis has, if the payload does not begin there: the reply to a flush was
--                      lost, or Redis has lost tokens. The worker calls again with the tokens from there on
--     {'error', text}  the keys of this job cannot be written: another client has overwritten them

local dead = KEYS[1]
local worker, group, dead_ttl, max_dead = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local values, counts, replies = cmsgpack.unpack(ARGV[5]), {}, {}

-- Ends one job, and returns the value for this job.
local function finish(job, events, stream, attempt, entry, channel, id, payload, offset, count, terminal, status,
                      has_started, reason, fields, progress)
  local state = state_before_end(job)
  if not state.status or has_ended(state.status)
    or not is_newest_attempt(tonumber(state.attempt), state.worker, attempt, worker) then
    remove_death(job, attempt, worker)
    return 'lost'
  end
  local stored, unsent = whole_number(state.generated) or 0, {}
  if payload ~= '' and stored ~= offset and stored <= offset + count then
    return stored
  end
  allow_writes_when_full(job)
  if has_started and not was_started(attempt, state.started_attempt) then -- no flush has started the job before its end
    fields[#fields + 1], fields[#fields + 2] = 'started_ms', state.started_ms or now_ms()
    unsent[1] = cmsgpack.pack({type = 'started', attempt = attempt, worker = worker})
  end
  if #progress > 0 then -- they are published, not stored
    for _, event in ipairs(unsent) do
      emit_last(events, channel, event)
    end
    unsent = {}
    for _, event in ipairs(progress) do
      redis.call('PUBLISH', channel, event)
    end
  end
  if payload ~= '' then
    unsent[#unsent + 1] = payload
  end
  terminate(job, events, channel, stream, group, entry, status, terminal, fields, unsent, counts, state)
  if reason ~= '' then
    add_dead_letter(job, events, dead, id, reason, '', dead_ttl, max_dead)
  end
  return 'ok'
end

for i = 0, (#KEYS - 1) / 3 - 1 do
  local job, events, stream = unpack(KEYS, 3 * i + 2, 3 * i + 4)
  replies[i + 1] = for_one_job(finish, job, events, stream, unpack(values, 13 * i + 1, 13 * i + 13))
end
store_counts(KEYS[2], counts)
return reply_for_jobs(replies)
