/* Answers of the server by question. An answer belongs to its question and to nothing else, so a late one can never
   take the place of a newer one; an answer that has aged is shown until its successor is here. */

const FRESH = 4000; // milliseconds; a run that is being written changes
const KEPT = 64;

/** `onSettled(entry)` is called for every answer; an entry is {value, error, pending, time}. */
export function createAnswers(api, onSettled) {
  const entries = new Map();

  function remembered(key) {
    const entry = entries.get(key) ?? { value: null, error: null, pending: false, time: -Infinity };
    entries.delete(key);
    entries.set(key, entry); // most recently used last
    while (entries.size > KEPT) entries.delete(entries.keys().next().value);
    return entry;
  }

  function settled(entry, value, error) {
    Object.assign(entry, { pending: false, time: performance.now(), error, value: value ?? entry.value });
    onSettled(entry);
  }

  return {
    request(route, question) {
      const entry = remembered(JSON.stringify([route, question]));
      const fresh = entry.error === null && performance.now() - entry.time < FRESH;
      if (entry.pending || fresh) return entry;
      entry.pending = true;
      Promise.resolve()
        .then(() => api[route](question))
        .then(
          (value) => settled(entry, value, null),
          (reason) => settled(entry, null, reason?.message || "The server did not answer."),
        );
      return entry;
    },
  };
}

/** Whether there is something to show: a value or an error. */
export function isSettled({ value, error }) {
  return value !== null || error !== null;
}
